// The counters, and the file that they end in.
#include "standin.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

namespace standin {

namespace {

struct Counts {
  long calls = 0, uploads = 0, blocking_uploads = 0, downloads = 0, peer_copies = 0, waits = 0;
  size_t uploaded_bytes = 0, downloaded_bytes = 0;
};

struct Book {
  std::mutex mutex;
  Counts all;
  std::map<std::string, Counts> operators;
  std::map<std::string, long> transfers;
};

// Never destroyed: other threads and later destructors still count.
Book& book() {
  static Book* const book = new Book;
  return *book;
}

template <typename Add>
void count(const std::string& name, Add add) {
  std::lock_guard<std::mutex> guard(book().mutex);
  add(book().all);
  add(book().operators[name]);
}

void transfer(const std::string& way, const std::string& what) {
  std::lock_guard<std::mutex> guard(book().mutex);
  ++book().transfers[way + " " + what];
}

void write(std::FILE* file, const Counts& counts) {
  std::fprintf(file,
               "\"calls\": %ld, \"uploads\": %ld, \"blocking_uploads\": %ld, \"uploaded_bytes\": %zu, \"downloads\": %ld, "
               "\"downloaded_bytes\": %zu, \"peer_copies\": %ld, \"waits\": %ld",
               counts.calls, counts.uploads, counts.blocking_uploads, counts.uploaded_bytes, counts.downloads,
               counts.downloaded_bytes, counts.peer_copies, counts.waits);
}

void write(std::FILE* file) {
  std::lock_guard<std::mutex> guard(book().mutex);
  std::fprintf(file, "{\n  ");
  write(file, book().all);
  std::fprintf(file, ",\n  \"devices\": [");
  for (int i = 0; i < device_count(); ++i) {
    const MemoryUse use = memory_use(static_cast<c10::DeviceIndex>(i));
    std::fprintf(file, "%s\n    {\"live_bytes\": %zu, \"peak_bytes\": %zu, \"allocations\": %zu, \"refused\": %zu}",
                 i == 0 ? "" : ",", use.live, use.peak, use.allocations, use.refused);
  }
  std::fprintf(file, "\n  ],\n  \"operators\": {");
  const char* between = "";
  for (const auto& [name, counts] : book().operators) {
    std::fprintf(file, "%s\n    \"%s\": {", between, name.c_str());
    write(file, counts);
    std::fprintf(file, "}");
    between = ",";
  }
  std::fprintf(file, "\n  },\n  \"transfers\": {");
  between = "";
  for (const auto& [what, times] : book().transfers) {
    std::fprintf(file, "%s\n    \"%s\": %ld", between, what.c_str(), times);
    between = ",";
  }
  std::fprintf(file, "\n  }\n}\n");
}

// Writes when the library's statics are destroyed, as the process ends.
struct AtExit {
  ~AtExit() {
    const char* named = std::getenv("DEEPSPEC_STANDIN_REPORT");
    if (named == nullptr) return;
    std::string path = named;
    if (const size_t at = path.find("%p"); at != std::string::npos) path.replace(at, 2, std::to_string(getpid()));
    std::FILE* file = std::fopen(path.c_str(), "w");
    if (file == nullptr) {
      std::perror(path.c_str());
      return;
    }
    write(file);
    std::fclose(file);
  }
} at_exit;

}  // namespace

void ran(const std::string& name) {
  count(name, [](Counts& counts) { ++counts.calls; });
}

void uploaded(const std::string& name, const std::string& what, size_t bytes, bool blocking) {
  count(name, [=](Counts& counts) {
    ++counts.uploads;
    counts.blocking_uploads += blocking;
    counts.uploaded_bytes += bytes;
  });
  transfer("upload", what);
}

void downloaded(const std::string& name, const std::string& what, size_t bytes) {
  count(name, [=](Counts& counts) {
    ++counts.downloads;
    counts.downloaded_bytes += bytes;
  });
  transfer("download", what);
}

void moved(const std::string& name, const std::string& what, size_t) {
  count(name, [](Counts& counts) { ++counts.peer_copies; });
  transfer("peer copy", what);
}

void waited(const std::string& name) {
  count(name, [](Counts& counts) { ++counts.waits; });
}

}  // namespace standin
