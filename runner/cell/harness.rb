# Runs one program in a cell and says what it came to, in a Finished frame on descriptor 3: see
# runner/messages.py.  Given: the path of the source, inputs as JSON, the limit of the value's bytes.
lambda do |path, inputs, limit|
  require "json"
  text = ->(string) { string.nil? ? "\xC0".b : [0xDB, string.bytesize].pack("CN") + string.b }
  finished = lambda do |value, representation, error, traceback|
    bytes = value.nil? ? "\xC0".b : [0xC6, value.bytesize].pack("CN") + value.b
    "\x96".b + text["Finished"] + bytes + text[representation] + text[error] + text[traceback] + "\xC2".b
  end
  send = lambda do |frame|
    control = IO.for_fd(3, "wb", autoclose: false)
    size = 65_536 - 1 # channel.PACKET_BYTES, less the mark
    (0...frame.bytesize).step(size) do |start|
      more = start + size < frame.bytesize ? "\x01" : "\x00"
      control.syswrite(more.b + frame.byteslice(start, size))
    end
  rescue SystemCallError
    nil # the program may have closed it
  end
  fit = ->(string, bytes) { string.byteslice(0, bytes).scrub("") }
  told = lambda do |value|
    next finished[nil, nil, nil, nil] if value.nil?

    plain = [String, Numeric, TrueClass, FalseClass, Array, Hash].any? { |kind| kind === value }
    json = plain ? (JSON.generate(value) rescue nil) : nil
    next finished[json, nil, nil, nil] if json && json.bytesize <= limit

    finished[nil, fit[value.inspect, limit], nil, nil]
  end
  ARGV.clear
  $PROGRAM_NAME = path
  main = TOPLEVEL_BINDING
  JSON.parse(inputs).each { |name, value| main.local_variable_set(name, value) }
  begin
    value = main.eval(File.read(path), path)
    $stdout.flush
    send[told[value]]
  rescue SystemExit
    raise
  rescue Exception => error # whatever a program raises is its result
    trace = error.full_message(highlight: false, order: :top).lines.grep_v(/^\tfrom -e:/).join
    $stdout.flush
    $stderr.write(trace)
    send[finished[nil, nil, fit["#{error.class}: #{error.message}", 1000], fit[trace, 50_000]]]
    exit!(1)
  end
end.call(ARGV[0], ARGV[1], ARGV[2].to_i)
