"""A receiver of OpenTelemetry spans in this process."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Collector:
    """The receiver of OTLP over HTTP: spans by request, in the order of their starts."""

    def __init__(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        collector = self
        self.spans = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                assert self.path == "/v1/traces"
                told = ExportTraceServiceRequest.FromString(
                    self.rfile.read(int(self.headers["Content-Length"]))
                )
                for resource in told.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *told):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def stop(self):
        if self.thread.is_alive():
            self.server.shutdown()
            self.thread.join()
            self.server.server_close()

    def of(self, trace):
        """Names, and attributes by name, of the spans of a trace."""
        spans = sorted(
            (s for s in self.spans if s.trace_id.hex() == trace), key=lambda s: s.start_time_unix_nano
        )
        return spans, [span.name for span in spans]


def facts(span):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
