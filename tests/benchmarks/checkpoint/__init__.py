"""Speed of saves and loads beside torch's and other checkpoint systems, over a real MinIO."""
