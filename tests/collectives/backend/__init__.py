"""The torch backend: unmodified programs over a hub and over RabbitMQ."""
