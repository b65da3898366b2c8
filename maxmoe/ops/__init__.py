"""Arrays in, arrays out: the mathematics of the model, one file per concept."""
