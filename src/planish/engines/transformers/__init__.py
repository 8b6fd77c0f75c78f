"""The engine that runs a model of transformers on the devices of this process."""
