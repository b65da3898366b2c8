"""Training: master weights, optimizer, loss, and the step that a mesh of devices runs."""
