"""What commands mean: values, queues, waiters, joins and the agents of elastic jobs."""
