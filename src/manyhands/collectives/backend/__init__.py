"""The torch.distributed backend: a fixed roster over a link."""
