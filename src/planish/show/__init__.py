"""Print what lies under a store URI as tables: `planish show`."""
