"""`manyhands demo` through a RabbitMQ node of its own, which is gone afterwards."""

import signal
import sys

from manyhands.cli.main import main
from manyhands.testing.broker import Broker

signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
print("a RabbitMQ node starts", file=sys.stderr)
with Broker() as broker:
    sys.argv[1:] = ["demo", "--amqp", broker.url(), *sys.argv[1:]]
    main()
