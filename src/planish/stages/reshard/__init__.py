"""The stage that writes a checkpoint anew for another layout, checks it and keeps the newest."""
