"""The laboratory: tasks, in-process simulation, local launch, comparison and the command line."""
