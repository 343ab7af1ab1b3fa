"""A server of the Open Inference Protocol v2, over REST and gRPC, on KServe's ModelServer."""
