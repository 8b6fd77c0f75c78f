"""Print the content of a store URI as tables: `planish show`."""
