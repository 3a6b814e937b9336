// faulty_device.c is what it takes to ask a daemon for errors of its GPU; ATTND_FAULTY must be in
// its environment.  ATTND_SLOW_REGIONS there: milliseconds that it takes to make a region, and to
// free one.
#ifndef ATTND_TESTS_FAULTY_DEVICE_H
#define ATTND_TESTS_FAULTY_DEVICE_H

enum { FAULTY_LAUNCH = 13, FAULTY_LOSS = 17, FAULTY_MEMORY = 19 }; // query tokens of a row
enum { FAULTY_REGION = 13 };                                       // bytes of a region

// Letters of ATTND_FAULTY_OPEN: ATTND_ECUDA, ATTND_ENOTSUP, ATTND_ENOMEM.
enum { FAULTY_CONTEXT = 'c', FAULTY_ABSENT = 'a', FAULTY_FULL = 'f' };

#endif
