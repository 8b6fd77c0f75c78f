"""Who writes which bytes where, and who reads them: plans, made from boxes alone; no torch."""
