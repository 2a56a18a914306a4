"""Pipeline parallelism: a schedule is a list of actions per rank, which one part makes, one proves
sound, one times and one runs."""
