// How OpenMP's threads wait for each other: asleep, after some tens of microseconds. libgomp lets them spin for milliseconds, which takes the cores from
// whatever else runs on them, and the threads that are waited for are among that. Operators on a few rows follow each other faster than a sleeper
// wakes, though: with two threads, the smoke suites of the tiny target, 16 sequences at a time, took sleepers 3.0 s, and 1.6 s so; one suite, one
// sequence at a time, 4.7 and 1.4 s. The first twice at once on those two cores took 3.2 and 4.9 s, and 16 s with nearly libgomp's own choice.
//
// libgomp reads its variables in a constructor, when it is loaded. What stands in an executable's .preinit_array runs before the
// constructors of its libraries, and before the C library has taken over the environment, which it does after that and so forgets
// what was set. The program is therefore started once more with the variable added: nothing has been done yet, so nothing is lost.
#include <cstddef>
#include <cstring>

#include <limits.h>
#include <unistd.h>

// Known once a header of the C library was read.
#ifdef __GLIBC__

namespace {

// Whoever sets one of these has decided.
constexpr const char* kDecided[] = {"OMP_WAIT_POLICY=", "GOMP_SPINCOUNT="};
constexpr size_t kMost = 16384;

char spins[] = "GOMP_SPINCOUNT=1000";

void settle(int, char** arguments, char** environment) {
  // Neither heap nor anything else of a library that is not set up yet is needed.
  static char* more[kMost + 2];
  size_t count = 0;
  for (; environment[count] != nullptr; ++count) {
    if (count == kMost) return;
    for (const char* name : kDecided) {
      if (std::strncmp(environment[count], name, std::strlen(name)) == 0) return;
    }
    more[count] = environment[count];
  }
  more[count] = spins;
  char program[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
  if (length <= 0) return;
  program[length] = '\0';
  // Started by the dynamic loader's own name, its arguments are no longer there.
  const char* name = std::strrchr(program, '/');
  if (name != nullptr && std::strncmp(name, "/ld", 3) == 0) return;
  // Where it cannot be started again it goes on as it is: slower on a busy machine, and right.
  execve(program, arguments, more);
}

__attribute__((section(".preinit_array"), used)) void (*const kSettle)(int, char**, char**) = settle;

}  // namespace
#endif

extern "C" {

// Does nothing by itself. The linker takes this file, and what runs before `main` with it, into programs that call this.
void ds_wait_asleep() {}
}
