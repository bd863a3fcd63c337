-- For wrk: POST the file named by the first argument; print the figures as one line of JSON.
-- What follows it are names and values of headers.

function init(args)
  local file = assert(io.open(args[1], "rb"))
  wrk.method = "POST"
  wrk.body = file:read("*a")
  wrk.headers["Content-Type"] = "application/json"
  for at = 2, #args, 2 do
    wrk.headers[args[at]] = args[at + 1]
  end
  file:close()
end

function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    'JSON{"requests": %d, "duration_s": %f, "p50_ms": %f, "p99_ms": %f, "mean_ms": %f, "errors": %d}\n',
    summary.requests, summary.duration / 1e6,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3, latency.mean / 1e3,
    e.connect + e.read + e.write + e.status + e.timeout))
end
