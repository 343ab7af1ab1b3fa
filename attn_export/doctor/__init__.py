"""Which runtimes work on this machine."""
