"""kvactors inside inference engines. Each engine has its own package, which imports the engine."""
