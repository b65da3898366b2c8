"""The built-in domains, a module each."""
