"""Reads the records of a Kafka consumer group, and keeps all state in the brokers instead of a state directory."""

from importlib import import_module

from shipper.model.errors import ConfigError
from shipper.model.version import install_command

try:
    import_module("confluent_kafka")  # only this package needs it
except ImportError:
    missing = f"needs confluent-kafka, which is not installed; run: {install_command('confluent-kafka')}"
    raise ConfigError(missing, key="input.kafka") from None
