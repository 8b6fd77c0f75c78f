"""From what the machines of a job measured to the machine that is unlike its peers."""
