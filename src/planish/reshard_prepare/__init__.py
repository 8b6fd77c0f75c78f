"""The first stage of a reshard run: pins the source and says what will be written."""
