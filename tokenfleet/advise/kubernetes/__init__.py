"""A fleet in Kubernetes, by raw HTTP: its pods as servers, and the API that lists them and scales."""
