"""The interfaces of the projects that manyhands descends from, on its own engine."""
