"""What became of tasks, rows and dead letters, told from Kafka alone."""
