"""C sources of the cpu device's WebAssembly module; pie_server.build.cpu_module compiles them with zig."""
