"""Actions on a faulty machine, and the guards that can refuse them."""
