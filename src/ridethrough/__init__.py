"""Training that rides through power loss."""
