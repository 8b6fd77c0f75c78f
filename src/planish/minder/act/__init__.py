"""What is done about a faulty machine, and what must hold before."""
