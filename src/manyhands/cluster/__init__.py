"""The cluster: a coordinator, the agents of its hosts, and the jobs that they run. No torch."""
