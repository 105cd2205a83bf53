# Runs programs in a cell and says what each came to, in a Finished frame on descriptor 3: see
# runner/messages.py.  Given: the language, and the path of what one program is given, as JSON; without
# a path, programs come on descriptor 3, one after the other, as runner/requests/forms.py puts them.
lambda do |given|
  require "json"
  packet = 65_536 # channel.PACKET_BYTES
  control = IO.for_fd(3, "r+b", autoclose: false)
  control.sync = true
  text = ->(string) { string.nil? ? "\xC0".b : [0xDB, string.bytesize].pack("CN") + string.b }
  post = lambda do |frame|
    size = packet - 1 # less the mark
    (0...frame.bytesize).step(size) do |start|
      more = start + size < frame.bytesize ? "\x01" : "\x00"
      control.syswrite(more.b + frame.byteslice(start, size))
    end
  end
  send = lambda do |value: nil, representation: nil, dropped: 0, error: nil, trace: nil, well: false, code: 0, nonce: ""|
    bytes = value.nil? ? "\xC0".b : [0xC6, value.bytesize].pack("CN") + value.b
    frame = "\x9A".b + text["Finished"] + bytes + text[representation] + text[error] + text[trace]
    frame += [well ? 0xC3 : 0xC2, 0x90].pack("C*") + text[nonce] + [0xCC, code & 0xFF].pack("C*")
    frame += [0xCE, [dropped, 0xFFFFFFFF].min].pack("CN")
    post[frame]
  rescue SystemCallError, IOError
    nil # the program may have closed it
  end
  fit = ->(string, bytes) { string.byteslice(0, bytes).scrub("") }
  equal_names = lambda do |value| # 1 and "1" have one name in JSON
    case value
    when Hash then value.keys.map(&:to_s).uniq.size < value.size || value.values.any?(&equal_names)
    when Array then value.any?(&equal_names)
    end
  end
  told = lambda do |value, limit|
    next {} if value.nil?

    plain = [String, Numeric, TrueClass, FalseClass, Array, Hash].any? { |kind| kind === value }
    json = plain ? (JSON.generate(value) rescue nil) : nil
    next { value: json } if json && json.bytesize <= limit && !equal_names[value]

    shown = value.inspect
    cut = fit[shown, limit]
    { representation: cut, dropped: shown.bytesize - cut.bytesize }
  end
  failure = lambda do |error|
    trace = error.full_message(highlight: false, order: :top).lines.grep_v(/^\tfrom -e:/).join
    $stdout.flush rescue nil
    STDERR.write(trace) rescue nil
    { error: fit["#{error.class}: #{error.message}", 1000], trace: fit[trace, 50_000], code: 1 }
  end

  held = "".b # a frame that has come in part: who waited for the rest may have given up
  keep = lambda do # takes a packet; returns the frame if it is whole
    piece = control.sysread(packet + 1)
    held << piece.byteslice(1..)
    next unless piece.getbyte(0).zero?

    held.tap { held = "".b }
  end
  unpacked = lambda do |frame| # as much of msgpack as an Answer has
    at = 0
    bytes = ->(size) { frame.byteslice((at += size) - size, size).force_encoding("UTF-8") }
    uint = ->(size) { bytes[size].bytes.reduce(0) { |sum, byte| (sum << 8) | byte } }
    item = lambda do
      case mark = uint[1]
      when 0..0x7F then mark
      when 0x90..0x9F then Array.new(mark & 0x0F) { item[] }
      when 0xA0..0xBF then bytes[mark & 0x1F]
      when 0xC0 then nil
      when 0xC4..0xC6 then bytes[uint[1 << (mark - 0xC4)]]
      when 0xCC..0xCE then uint[1 << (mark - 0xCC)]
      else bytes[uint[1 << (mark - 0xD9)]]
      end
    end
    item[]
  end
  # Timeouts, Thread#raise and SIGINT come while an answer is waited for, never while one is read: what
  # was read would be lost, and what comes next be taken for it.
  undisturbed = lambda do |work|
    before, waits, owed = nil, false, false
    interrupt = -> { before.respond_to?(:call) ? before.call(Signal.list["INT"]) : raise(Interrupt, "") }
    settle = -> { owed, was_owed = false, owed; interrupt[] if was_owed && before != "IGNORE" }
    wait = lambda do |sources|
      waits = true
      settle[]
      Thread.handle_interrupt(Object => :immediate) { IO.select(sources)[0] }
    ensure
      waits = false
    end
    handle = -> { Thread.handle_interrupt(Object => :never) { work[wait] } }
    next handle[] unless Thread.current == Thread.main # SIGINT comes there

    begin
      before = trap("INT") { owed = true; settle[] if waits }
      handle[]
    ensure
      trap("INT", before || "DEFAULT")
      settle[]
    end
  end
  names = []
  number = 0
  sites = false # whether calls tell where in the program they stand
  turn = Mutex.new
  hangup = nil # a pipe that is readable once nobody may wait any more; none while nobody may call
  process = Process.pid
  tool_error = Class.new(StandardError) do
    attr_reader :kind

    def initialize(kind, message)
      @kind = kind
      super(message)
    end
  end
  call = lambda do |name, arguments|
    raise tool_error.new("closed", "only the program's first process can call tools") if Process.pid != process

    arguments = JSON.generate(arguments).b
    site = sites ? caller_locations.find { |place| place.path != "-e" }.to_s[0, 100] : ""
    answer = turn.synchronize do
      raise tool_error.new("closed", "there is no request in which to call a tool") unless hangup

      undisturbed[lambda do |wait|
        mine = number += 1
        post["\x95".b + text["Call"] + [0xCE, mine].pack("CN") + text[name] +
             [0xC6, arguments.bytesize].pack("CN") + arguments + text[site]]
        loop do
          raise tool_error.new("closed", "the program has ended") if wait[[control, hangup[0]]].include?(hangup[0])

          frame = keep[]
          answer = frame && unpacked[frame]
          break answer if answer && answer[1] == mine # others were given up
        end
      end]
    end
    raise tool_error.new(*answer[3..]) unless answer[3].empty?

    answer[2] && JSON.parse(answer[2])
  end
  # Beside a way to call it by its name, a tool is what its name says, step by step.
  place = Class.new(BasicObject) do
    define_method(:initialize) { |prefix| @prefix = prefix }
    define_method(:inspect) { "<tools #{names.select { |name| name.start_with?(@prefix) }.join(', ')}>" }
    define_method(:method_missing) do |word, given = nil, **named|
      name = "#{@prefix}#{word}"
      leads_on = names.any? { |each| each.start_with?("#{name}.") }
      if names.include?(name) && (given || !named.empty? || !leads_on)
        call[name, (given || {}).merge(named)]
      elsif leads_on
        place.new("#{name}.")
      else
        ::Kernel.raise ::NoMethodError, "there is no tool #{name}; there are #{names.join(', ')}"
      end
    end
    define_method(:respond_to_missing?) { |*| true }
  end
  offer = lambda do |offered|
    next if offered.empty?

    names.replace(offered)
    hangup = IO.pipe
    next if Object.const_defined?(:Tools)

    tools = Class.new(place) { define_method(:call) { |name, given = {}, **named| call[name.to_s, given.merge(named)] } }
    Object.const_set(:Tools, tools.new(""))
    Object.const_set(:ToolError, tool_error)
  end
  take_back = lambda do
    next unless hangup

    hangup[1].close
    turn.synchronize { hangup = hangup.each { |side| side.close unless side.closed? } && nil }
  end

  main = TOPLEVEL_BINDING
  give = lambda do |request|
    ENV.update(request["environment"])
    ARGV.replace(request["arguments"]) unless request["arguments"].empty?
    request["inputs"].each { |name, value| main.local_variable_set(name, value) }
  end

  once = lambda do
    request = JSON.parse(File.read(given))
    File.unlink(given)
    $PROGRAM_NAME = request["path"]
    give[request]
    sites = request["sites"]
    offer[request["tools"]]
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
    loop do
      frame = keep[]
      break frame if frame&.start_with?("{") # and is no answer to a call that was given up
    end
  end
  flags = File::WRONLY | File::CREAT | File::TRUNC | File::NONBLOCK | File::BINARY
  write = lambda do |path, content| # to open a FIFO without NONBLOCK would wait for a reader
    File.open(path, flags) do |file|
      raise Errno::EINVAL, "#{path}: not a regular file" unless file.stat.file?

      file.write(content)
    end
  end
  prepare = lambda do |request, contents|
    at = 0
    request["files"].each do |name, size, executable|
      path = File.join("/workspace", name)
      File.dirname(path).split("/").reduce do |above, part|
        "#{above}/#{part}".tap { |directory| Dir.mkdir(directory) unless Dir.exist?(directory) }
      end
      write[path, contents.byteslice(at, size)]
      File.chmod(0o700, path) if executable
      at += size
    end
    input = contents.byteslice(at, request["stdin"])
    File.binwrite("/tmp/cell.stdin", input) unless input.empty?
    STDIN.reopen(input.empty? ? "/dev/null" : "/tmp/cell.stdin")
    give[request]
    sites = request["sites"]
    offer[request["tools"]]
  end
  # Ignored but while a program runs: SIGINT never interrupts what is done in between.
  handler = "DEFAULT"
  interruptibly = lambda do |request|
    trap("INT", handler)
    main.eval(request["code"], "<cell #{request['request']}>")
  ensure
    handler = trap("INT", "IGNORE") || "DEFAULT"
  end
  answer = lambda do |request, contents|
    prepare[request, contents]
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
      header, contents = receive[].split("\n", 2)
      request = JSON.parse(header.force_encoding("UTF-8"))
      finished = answer[request, contents]
      take_back[]
      [$stdout, $stderr].each { |stream| stream.flush rescue nil }
      send[**finished, nonce: request["nonce"]]
    end
  rescue EOFError
    exit!(0)
  end

  ARGV.clear
  given ? once.call : converse.call
end.call(ARGV[1])
