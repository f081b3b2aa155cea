"""One module per engine: command line, readiness, metrics, versions."""
