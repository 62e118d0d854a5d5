"""Doctor: everything that could go wrong, measured, each finding with its remedy.

    examine(request) ─► findings, one after the other, as they are made
      machine   versions, torch and its devices, limits of this machine
      network   DNS, TCP, what answers on a port, a raw copy over loopback
      hub       TLS and pin, token, run, protocol version of a hub
      broker    TLS, login, permissions, alarms of a RabbitMQ broker
      measure   two peers of this process: latency and bandwidth through the meeting point

A check is a function from explicit inputs to findings; it raises nothing and has a time limit.
"""
