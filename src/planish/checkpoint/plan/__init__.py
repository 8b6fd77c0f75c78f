"""Plans, made from boxes alone: which rank writes or reads which bytes, and where; no torch."""
