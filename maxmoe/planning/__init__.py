"""What a step of a model costs on a slice of chips: capacity, work, collectives, bounds. `maxmoe.plan` prints it."""
