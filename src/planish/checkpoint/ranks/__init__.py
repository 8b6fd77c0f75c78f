"""Communication of the ranks of a save or load: messages, their tree and their errors."""
