"""The training processes: the job, the program of a rank, and the common exit of all ranks."""
