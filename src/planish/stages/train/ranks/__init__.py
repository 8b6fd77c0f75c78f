"""The training processes: the job, the program of a rank, and how ranks leave together."""
