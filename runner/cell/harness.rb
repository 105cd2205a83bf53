# Runs programs in a cell and says what each came to, in a Finished frame on descriptor 3: see
# runner/messages.py.  Given: the language, and the path of what one program is given, as JSON; without
# a path, programs come on descriptor 3, one after the other, as runner/wording.py puts them.
lambda do |given|
  require "json"
  packet = 65_536 # channel.PACKET_BYTES
  control = IO.for_fd(3, "r+b", autoclose: false)
  control.sync = true
  text = ->(string) { string.nil? ? "\xC0".b : [0xDB, string.bytesize].pack("CN") + string.b }
  send = lambda do |value: nil, representation: nil, error: nil, trace: nil, well: false, code: 0|
    bytes = value.nil? ? "\xC0".b : [0xC6, value.bytesize].pack("CN") + value.b
    frame = "\x98".b + text["Finished"] + bytes + text[representation] + text[error] + text[trace]
    frame += [well ? 0xC3 : 0xC2, 0x90, 0xCC, code & 0xFF].pack("C*")
    size = packet - 1 # less the mark
    (0...frame.bytesize).step(size) do |start|
      more = start + size < frame.bytesize ? "\x01" : "\x00"
      control.syswrite(more.b + frame.byteslice(start, size))
    end
  rescue SystemCallError, IOError
    nil # the program may have closed it
  end
  fit = ->(string, bytes) { string.byteslice(0, bytes).scrub("") }
  told = lambda do |value, limit|
    next {} if value.nil?

    plain = [String, Numeric, TrueClass, FalseClass, Array, Hash].any? { |kind| kind === value }
    json = plain ? (JSON.generate(value) rescue nil) : nil
    next { value: json } if json && json.bytesize <= limit

    { representation: fit[value.inspect, limit] }
  end
  failure = lambda do |error|
    trace = error.full_message(highlight: false, order: :top).lines.grep_v(/^\tfrom -e:/).join
    $stdout.flush rescue nil
    STDERR.write(trace) rescue nil
    { error: fit["#{error.class}: #{error.message}", 1000], trace: fit[trace, 50_000], code: 1 }
  end
  main = TOPLEVEL_BINDING
  give = lambda do |request|
    ENV.update(request["environment"])
    request["inputs"].each { |name, value| main.local_variable_set(name, value) }
  end

  once = lambda do
    request = JSON.parse(File.read(given))
    File.unlink(given)
    $PROGRAM_NAME = request["path"]
    give[request]
    begin
      value = main.eval(File.read(request["path"]), request["path"])
      $stdout.flush
      send[**told[value, request["limit"]]]
    rescue SystemExit
      raise
    rescue Exception => error # whatever a program raises is its result
      send[**failure[error]]
      exit!(1)
    end
  end

  receive = lambda do
    frame = "".b
    loop do
      piece = control.sysread(packet + 1)
      frame << piece.byteslice(1..)
      break frame if piece.getbyte(0).zero?
    end
  end
  prepare = lambda do |frame|
    header, contents = frame.split("\n", 2)
    request = JSON.parse(header.force_encoding("UTF-8"))
    at = 0
    request["files"].each do |name, size, executable|
      path = File.join("/workspace", name)
      File.dirname(path).split("/").reduce do |above, part|
        "#{above}/#{part}".tap { |directory| Dir.mkdir(directory) unless Dir.exist?(directory) }
      end
      File.binwrite(path, contents.byteslice(at, size))
      File.chmod(0o700, path) if executable
      at += size
    end
    input = contents.byteslice(at, request["stdin"])
    File.binwrite("/tmp/cell.stdin", input) unless input.empty?
    STDIN.reopen(input.empty? ? "/dev/null" : "/tmp/cell.stdin")
    give[request]
    request
  end
  # Ignored but while a program runs: SIGINT never interrupts what is done in between.
  handler = "DEFAULT"
  interruptibly = lambda do |request|
    trap("INT", handler)
    main.eval(request["code"], "<cell #{request['request']}>")
  ensure
    handler = trap("INT", "IGNORE") || "DEFAULT"
  end
  answer = lambda do |frame|
    request = prepare[frame]
    value = interruptibly[request]
    main.local_variable_set(:_, value) unless value.nil?
    { **told[value, request["limit"]], well: true }
  rescue SystemExit => leaving
    { code: leaving.status, well: leaving.status.zero? }
  rescue Exception => error # whatever a program raises is its result
    failure[error]
  end
  converse = lambda do
    trap("INT", "IGNORE")
    $PROGRAM_NAME = "cell"
    send[well: true] # it has started
    loop do
      finished = answer[receive[]]
      [$stdout, $stderr].each { |stream| stream.flush rescue nil }
      send[**finished]
    end
  rescue EOFError
    exit!(0)
  end

  ARGV.clear
  given ? once.call : converse.call
end.call(ARGV[1])
