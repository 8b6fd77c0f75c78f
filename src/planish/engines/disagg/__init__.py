"""The disaggregated engine of MegaScale-Infer: separate attention ranks and expert ranks."""
