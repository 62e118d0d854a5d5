"""The planner: what layers cost, what peers can do, and the plan that follows from both."""
