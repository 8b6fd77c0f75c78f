"""The trainer on megatron-core: models whose matrices several ranks share."""
