// shoal_tests [PART]: runs the tests whose "file/name" contains PART, all of them without it.

#include "check.h"

int main(int argc, char** argv) { return shoal::check::run(argc > 1 ? argv[1] : ""); }
