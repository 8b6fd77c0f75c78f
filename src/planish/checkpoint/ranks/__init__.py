"""How the ranks of a save or load agree: messages, their tree and their errors."""
