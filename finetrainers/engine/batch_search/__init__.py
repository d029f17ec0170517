"""The search for the batch size of each bucket: by the estimate, then by measured training steps."""
