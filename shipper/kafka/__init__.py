"""How are the records of a Kafka consumer group read, and settled in the brokers alone, without a state directory?"""
