"""Write a checkpoint anew for another layout, check it, and keep the newest of a folder."""
