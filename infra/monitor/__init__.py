"""What a run does now, read from Kafka alone: partitions, roles, who waits for whom."""
