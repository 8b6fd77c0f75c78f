"""What the training processes run: the job, the program of a rank, and how ranks leave together."""
