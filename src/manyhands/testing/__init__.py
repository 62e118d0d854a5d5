"""The public test kit: a private RabbitMQ node, leak checks, the contract suite of the links."""
