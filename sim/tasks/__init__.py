"""Built-in tasks: data, model, loss and metrics, ready to be named in a configuration."""
