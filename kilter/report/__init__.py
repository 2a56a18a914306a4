"""What verbs and benchmarks share when they show something: text tables, progress, the machine."""
